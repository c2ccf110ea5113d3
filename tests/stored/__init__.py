"""Files and frames as released versions wrote them. Later versions must read them, or refuse them by name."""
