"""What a machine with one GPU shows about core-rl: fifteen points, each with a time limit, and a report."""
