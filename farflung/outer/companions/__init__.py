"""What goes along with a method's rounds; `base.py` says what a loop asks of it."""
