"""The report of a session of the suite: a JSON file with a published schema, and pages made from it."""
