"""How fast it is: codecs, outer steps, rounds and pipelines, beside what the machine and the link allow."""
