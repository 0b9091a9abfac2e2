"""Claim kinds: a module each, that says which points a claim is about, what they lack, give and show."""
