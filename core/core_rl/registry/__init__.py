"""Engine specs and the lookup of engines by name. Importing it imports no torch."""
