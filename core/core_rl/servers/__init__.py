"""Kit for inference engines over HTTP servers: launching, fleets, retries, versions, weights; needs ``aiohttp``."""
