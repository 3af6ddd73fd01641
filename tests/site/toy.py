"""A toy in its page, and what is said where it shows something else than it should."""

import math
import time

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


class Toy:
    """One toy in the page that it is on."""

    def __init__(self, chromium, page, name):
        self.chromium, self.name = chromium, name
        chromium.open(page)
        ready = f"return document.querySelector('[data-toy=\"{name}\"]').dataset.ready === 'yes'"
        for _ in range(300):
            if chromium.run(ready):
                return
            time.sleep(0.1)
        raise AssertionError(f"it does not start: {self.message()}")

    def element(self, part):
        return self.chromium.driver.find_element(By.ID, f"{self.name}-{part}")

    def set(self, **inputs):
        for part, value in inputs.items():
            self.chromium.run(
                "const input = arguments[0], value = arguments[1];"
                "if (input.type === 'checkbox') input.checked = value; else input.value = value;"
                "input.dispatchEvent(new Event('input', { bubbles: true }));",
                self.element(part.replace("_", "-")),
                value,
            )

    def wait_for(self, condition):
        for _ in range(100):
            if condition():
                return
            time.sleep(0.1)
        raise AssertionError(f"in vain: {self.message()}")

    def press(self, part):
        """With the keyboard."""
        self.element(part).send_keys(Keys.ENTER)

    def text(self, part):
        return self.element(part).text

    def message(self):
        return self.chromium.run(
            f"return document.querySelector('[data-toy=\"{self.name}\"] .message').textContent"
        )

    def rows(self, part):
        """The cells of a table's body."""
        return self.chromium.run(
            "return [...arguments[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent))",
            self.element(part),
        )


def number(text):
    if text == "∞":
        return math.inf
    return float(text.replace("−", "-").replace(",", "").rstrip("%"))


def expect(what, shown, wanted):
    assert shown == wanted, f"{what}: {shown!r}, not {wanted!r}"


def expect_number(what, text, wanted, digits):
    """`text` is a float32 to that many digits; the page's libm and this machine's may differ by the
    last bit or two of a float32."""
    shown = number(text)
    if math.isinf(wanted) or math.isnan(wanted):
        assert repr(shown) == repr(wanted), f"{what}: {text}, not {wanted}"
        return
    bound = (0.5 * 10.0 ** (1 - digits) + 4 * 2.0**-24) * abs(wanted) + 1e-44
    assert abs(shown - wanted) <= bound, f"{what}: {text}, not {wanted}"


def check_bad_inputs(toy, **inputs):
    """Each gets a message, which goes with a good value, and no complaint on the console."""
    for part, bad in inputs.items():
        good = toy.element(part.replace("_", "-")).get_attribute("value")
        for value in bad:
            toy.set(**{part: value})
            assert toy.message(), f"{part} is {value!r}, and nothing is said"
        toy.set(**{part: good})
        expect(f"the message after a good {part}", toy.message(), "")
