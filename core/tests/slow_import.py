"""A backend that takes long to import."""

import time

time.sleep(2.0)
