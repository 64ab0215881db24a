"""What networks of peers that come and go have alike: keys, tickets, records of who is there, what is believed."""
