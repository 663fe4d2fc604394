"""StatsD over UDP: datagrams, the metrics in them, and what was lost."""
