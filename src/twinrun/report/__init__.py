"""Records as people read them: terminal tables, pictures and pages that open from disk."""
