"""Weight transfer from a train engine to inference engines."""
