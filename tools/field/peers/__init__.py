"""The frameworks, behind the few calls that measurements make; each module imports its framework."""
