"""Where ranks run: `LocalHosts` on this machine, and others on many machines, by an agent on each."""
