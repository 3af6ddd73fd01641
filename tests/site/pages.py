"""Loads every page of the built site in Chromium, on a telephone and on a desktop, in light and dark.

    tests/site/pages.py SITE [--screens FOLDER]

Says what is wrong, and fails: complaints on the console, links and anchors that lead nowhere, pictures
without words, controls without labels, pale text, pages that scroll sideways.
"""

import pathlib
import sys
import urllib.parse

import browser

INSPECT = (pathlib.Path(__file__).parent / "inspect.js").read_text(encoding="utf-8")


def broken_links(pages):
    """`pages` maps a page to what inspect.js returned."""
    for page, found in pages.items():
        for href in found["links"]:
            url = urllib.parse.urlsplit(href)
            if url.scheme:
                if url.scheme != "https" or not url.netloc:
                    yield f"{page}: not an https link: {href}"
            elif (url.path or page) not in pages:
                yield f"{page}: leads nowhere: {href}"
            elif url.fragment and url.fragment not in pages[url.path or page]["ids"]:
                yield f"{page}: no such anchor: {href}"


def unreachable(pages):
    reached, left = {"index.html"}, ["index.html"]
    while left:
        for href in pages[left.pop()]["links"]:
            path = urllib.parse.urlsplit(href).path
            if path in pages and path not in reached:
                reached.add(path)
                left.append(path)
    return sorted(set(pages) - reached)


def faults_of(site, screens=None):
    """What is wrong, and how many pages there are."""
    site = pathlib.Path(site)
    wrong, pages = [], {}
    with browser.Browser(site) as chromium:
        for path in sorted(site.glob("*.html")):
            page = path.name
            for size, dark in ((browser.PHONE, True), (browser.DESKTOP, False)):
                look = f"{page} ({size[0]} pixels, {'dark' if dark else 'light'})"
                chromium.look(size, dark)
                chromium.open(page)
                if screens:
                    name = f"{path.stem}-{size[0]}-{'dark' if dark else 'light'}.png"
                    chromium.screenshot(pathlib.Path(screens) / name)
                    chromium.look(size, dark)
                found = chromium.run(INSPECT)
                wrong += [f"{look}: {one}" for one in found["wrong"] + chromium.complaints()]
                pages[page] = found
    wrong += broken_links(pages)
    wrong += [f"{page}: no page leads to it" for page in unreachable(pages)]
    return wrong, len(pages)


def main(site, screens=None):
    wrong, count = faults_of(site, screens)
    for one in wrong:
        print(one)
    print(f"{count} pages, {len(wrong)} faults")
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    folder = None
    if len(arguments) == 3 and arguments[1] == "--screens":
        folder = arguments[2]
    elif len(arguments) != 1:
        sys.exit(__doc__)
    sys.exit(main(arguments[0], folder))
