"""Consumer groups: members, generations, rebalances, and the writing of committed offsets."""
