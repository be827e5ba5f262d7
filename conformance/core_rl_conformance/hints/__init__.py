"""What a failure looks like: known shapes of errors, said in a sentence."""
