"""The page itself, made with Gradio: nothing in it leaves the machine."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmoe.demo.budgets import STEP, Slider
from deepmoe.demo.cards import EMPTY, STYLE, answer_card, error_card, image_card, note_card
from deepmoe.demo.showing import MOST_BYTES, Demo
from deepmoe.errors import UserError
from deepmoe.extras import require

if TYPE_CHECKING:
    from fastapi import FastAPI

HOSTS = ("127.0.0.1", "localhost")
# The browser asks nobody else, whatever Gradio's own scripts would like.
POLICY = "; ".join(
    [
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "frame-ancestors 'none'",
    ]
)
QUIET = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
}


def make_app(demo: Demo, title: str, folder: Path, samples: Sequence[Path] = ()) -> "FastAPI":
    """The page as an application for a web server.

    Args:
        demo: answers the images.
        title: of the model.
        folder: for uploads; whoever made it removes it.
        samples: images in that folder to choose from.

    Raises:
        UserError: where Gradio is missing.
    """
    require("demo", "gradio")
    require("report", "matplotlib")
    os.environ.update(QUIET, GRADIO_TEMP_DIR=str(folder))  # read when Gradio is imported, or later
    import gradio
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # Without pages of FastAPI's own: they load scripts from elsewhere.
    silent: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(**silent)
    app.add_middleware(_WithPolicy)
    # Another site can give its name our address, but not change the name that browsers then send.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS))
    system = ["system-ui", "sans-serif"]  # others are fetched from elsewhere
    theme = gradio.themes.Default(font=system, font_mono=["monospace"])
    return gradio.mount_gradio_app(
        app,
        _blocks(demo, title, samples),
        path="/",
        server_name=HOSTS[0],
        footer_links=[],
        run_history=False,
        app_kwargs=silent,
        allowed_paths=[],
        show_error=False,
        max_file_size=MOST_BYTES,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme,
        css=STYLE,
    )


def _blocks(demo: Demo, title: str, samples: Sequence[Path]) -> Any:
    import gradio

    def show(image: str | None, budget: float | None = None) -> tuple[str, str]:
        if image is None:
            return "", EMPTY
        try:
            shown = demo.show(image, budget)
        except UserError as error:
            return "", error_card(str(error))
        return image_card(shown), answer_card(shown)

    with gradio.Blocks(title=f"deepmoe: {title}", analytics_enabled=False) as blocks:
        gradio.HTML(note_card("What ran for your image, and what it cost.", title))
        with gradio.Row():
            with gradio.Column(scale=2):
                image = gradio.File(label="Image", height=140, elem_id="image")
                inputs = [image, *_slider(demo, gradio)]
                if samples:
                    gallery = gradio.Gallery(
                        [str(path) for path in samples],
                        label="Or take a test image",
                        columns=8,
                        height="auto",
                        allow_preview=False,
                        interactive=False,
                        buttons=[],
                        elem_id="samples",
                    )
                seen = gradio.HTML(elem_id="seen")
            with gradio.Column(scale=3):
                answer = gradio.HTML(EMPTY, elem_id="answer")
        if samples:

            def take(chosen: gradio.SelectData) -> str:
                return str(samples[int(chosen.index)])

            gallery.select(take, None, image, api_visibility="private")
        for changed in inputs:
            # Of a slider that is being drawn, only where it is now counts.
            changed.change(
                show,
                inputs,
                [seen, answer],
                api_visibility="private",
                trigger_mode="always_last",
                show_progress="hidden",
            )
    return blocks.queue(max_size=16, default_concurrency_limit=1)


def _slider(demo: Demo, gradio: Any) -> list[Any]:
    """The slider, or why there is none."""
    slider = demo.slider
    if not isinstance(slider, Slider):
        gradio.HTML(note_card(slider), elem_id="budget")
        return []
    made = gradio.Slider(
        slider.low,
        slider.high,
        slider.value,
        step=STEP,
        label=slider.label,
        info=slider.info,
        elem_id="budget",
    )
    return [made]


class _WithPolicy:
    """Tells browsers what the page may load: only what this server gives."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode())
                message = {**message, "headers": [*message["headers"], policy]}
            await send(message)

        await self.app(scope, receive, send_with_policy)
