"""Process groups, collectives and channels between processes."""
