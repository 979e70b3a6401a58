"""The page in a browser; and what its server refuses."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_models import NASTY, make
from PIL import Image

from deepmoe.demo import showing
from deepmoe.demo.page import QUIET
from deepmoe.demo.server import listening, make_server

pytest.importorskip("gradio")
import httpx  # Gradio brings it

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("uploads")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """A demo of a gated model whose classes have hostile names."""
    with pytest.MonkeyPatch.context() as patch, listening(0) as listener:
        for name in ("WARM_UP_ROUNDS", "TIMED_ROUNDS"):
            patch.setattr(showing, name, 1)
        for name in (*QUIET, "GRADIO_TEMP_DIR"):  # set by the page, and not to stay for other tests
            patch.setenv(name, "")
        sample = folder / "sample.png"
        Image.new("RGB", (8, 8), "red").save(sample)
        server = make_server(make("gated"), folder, [sample])
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def test_the_server_does_only_what_the_page_asks(address: str, folder: Path, tmp_path) -> None:
    outside = tmp_path / "outside.png"
    Image.new("RGB", (8, 8)).save(outside)

    def question(path: str) -> dict:
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        return {"fn_index": 1, "data": [file, 1.0], "session_hash": "x", "event_data": None}

    with httpx.Client(base_url=address, trust_env=False) as client:
        page = client.get("/")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        asked = "/gradio_api/queue/join"
        upload = {"files": ("a.png", b"no image")}
        (inside,) = client.post("/gradio_api/upload", files=upload).json()
        assert Path(inside).is_relative_to(folder)
        assert client.post(asked, json=question(inside)).status_code == 200
        for path in (outside, "/etc/passwd", f"{folder}/../x", "http://example.com/a.png", "\0"):
            assert client.post(asked, json=question(str(path))).status_code == 403
            assert client.get(f"/gradio_api/file={path}".replace("\0", "%00")).status_code >= 400
        assert client.post(asked, content=b"{" * 10).status_code == 403
        assert client.post(asked, content=b" " * 2**17).status_code == 403
        assert client.post("/gradio_api/run/predict", json=question(inside)).status_code == 403
        for stranger in ({"host": "example.com"}, {"origin": "http://example.com"}):
            assert client.get("/", headers=stranger).status_code == 403
            assert client.post(asked, json=question(inside), headers=stranger).status_code == 403
        large = {"files": ("a.png", bytes(showing.MOST_BYTES + 2**16))}
        assert client.post("/gradio_api/upload", files=large).status_code == 413


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_the_page_answers_in_a_browser(address: str, tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api")
    Image.effect_noise((40, 30), 90).save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=BROWSER, args=list(FLAGS)
        )
        page, asked = browser.pages[0], []
        browser.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        answer = page.locator("#answer")

        def upload(name: str) -> None:
            page.locator("#image input[type=file]").set_input_files(tmp_path / name)

        upload("good.png")
        api.expect(answer.locator("img.channels")).to_be_visible()
        api.expect(answer.locator(".row")).to_have_count(7)  # three classes, MACs, times
        before = answer.inner_text()
        assert NASTY in before and answer.locator("img").count() == 1
        assert "MACs" in before and " ms" in before and "Answered by the base network" in before
        number = page.locator("#budget input[type=number]")
        number.fill(number.get_attribute("min"))
        number.press("Enter")
        api.expect(answer).not_to_have_text(before, use_inner_text=True)
        closed = answer.locator("h3", has_text="Channels that ran: 0 of")
        api.expect(closed).to_be_visible()
        page.locator("#image button[aria-label=Clear]").click()
        api.expect(answer).to_contain_text("Drop an image")
        upload("broken.png")
        api.expect(answer.locator(".error")).to_have_text(
            "cannot read image broken.png: not an image"
        )
        assert page.locator("#seen img").count() == 0
        page.locator("#samples .thumbnail-item").first.click()
        api.expect(answer.locator("img.channels")).to_be_visible()
        browser.close()
    assert asked and all(url.startswith((address, "data:", "blob:")) for url in asked)
