"""Where a batch's rows go besides the state store: databases, topics, datasets and functions of the user's."""
