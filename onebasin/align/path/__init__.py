"""Between networks: the line that joins them, their mean, and how to mend it."""
