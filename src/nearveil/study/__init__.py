"""Tables and figures: the papers' and ours, one command each."""
