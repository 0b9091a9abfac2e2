"""Lock files of a stack: refresh and check, and one resolver for each kind of pin."""
