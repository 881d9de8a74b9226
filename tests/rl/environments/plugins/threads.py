"""A file that starts a thread when it is imported."""

import threading
import time

threading.Thread(target=time.sleep, args=(60,), name="of the user", daemon=True).start()


class Environment:
    def reset(self, **columns):
        return None

    def step(self, completion):
        return None
