"""A headless Chromium (Debian's chromium and chromium-driver) that looks at the built site."""

import pathlib
import shutil
import socket
import sys

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

PHONE = (360, 740)
DESKTOP = (1200, 900)


def missing():
    """What a small container lacks that Chromium needs; empty where nothing is missing."""
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        return "there is no chromium with its chromedriver"
    if not pathlib.Path("/proc/self").exists():
        return "Chromium reads /proc, which is not mounted"
    try:
        socket.getaddrinfo("localhost", 80)
    except OSError:
        return "localhost, where chromedriver listens, has no address (/etc/hosts has it elsewhere)"
    return ""


class Browser:
    def __init__(self, site):
        self.site = pathlib.Path(site).resolve()
        if not (self.site / "index.html").exists():
            sys.exit(f"{self.site}: no index.html; make site builds it")
        if missing():
            print(f"skipped: {missing()}")
            sys.exit(0)
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                         "--disable-dev-shm-usage", "--force-device-scale-factor=1"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.driver.set_script_timeout(30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.driver.quit()

    def look(self, size=DESKTOP, dark=False):
        """Sets the size of the window's inside, and the colours that the reader prefers."""
        width, height = size
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]},
        )

    def open(self, page):
        self.driver.get((self.site / page).as_uri())

    def run(self, script, *arguments):
        """What a function body in JavaScript returns, in the open page."""
        return self.driver.execute_script(script, *arguments)

    def complaints(self):
        """What the console has got since the last call, but for remarks of level INFO and below."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("WARNING", "SEVERE")
        ]

    def screenshot(self, path):
        """The whole page, not only what the window shows."""
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return window.innerWidth")
        self.look_tall(width, height)
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))

    def look_tall(self, width, height):
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
