"""Weight transfer from a train engine to inference engines. Nothing here depends on an engine."""
