"""What the parts say to each other through Redis: keys, records, verbs, and the rules over them."""
