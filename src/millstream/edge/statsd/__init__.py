"""StatsD over UDP: receiving datagrams, parsing metrics, and counting losses."""
