"""Ways in: the offline API and the command line."""
