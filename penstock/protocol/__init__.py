"""Redis keys, records, calls of verbs, and the rules that apply to them."""
