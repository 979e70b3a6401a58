"""The page itself, made with Gradio: nothing in it leaves the machine."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmoe.demo.budgets import STEP, Slider
from deepmoe.demo.cards import EMPTY, STYLE, answer_card, error_card, image_card, note_card
from deepmoe.demo.guard import HOSTS, Guard, is_upload
from deepmoe.demo.showing import MOST_BYTES, Demo
from deepmoe.errors import UserError
from deepmoe.extras import require

if TYPE_CHECKING:
    from fastapi import FastAPI

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

    # Without pages of FastAPI's own: they load scripts from elsewhere.
    silent: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(**silent)
    app.add_middleware(Guard, folder=folder)
    system = ["system-ui", "sans-serif"]  # others are fetched from elsewhere
    theme = gradio.themes.Default(primary_hue="blue", font=system, font_mono=["monospace"])
    theme.set(block_info_text_color="*neutral_500")
    return gradio.mount_gradio_app(
        app,
        _blocks(demo, title, folder, samples),
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


def answered(demo: Demo, folder: Path, upload: Any, budget: Any = None) -> tuple[str, str]:
    """The image and the answer as HTML; a mistake is a sentence in the answer's place.

    Args:
        demo: answers the images.
        folder: of uploads: files elsewhere are not read, whoever asks for them.
        upload: what the page sends for a file; `None` where it was taken away.
        budget: the slider's value, if there is a slider.
    """
    if upload is None:
        return "", EMPTY
    try:
        if budget is not None and type(budget) not in (int, float):
            raise UserError("a budget is a number")
        path = upload.get("path") if isinstance(upload, dict) else None
        if path is None or not is_upload(folder, path):
            raise UserError("this is not an image that was uploaded here")
        shown = demo.show(path, budget)
    except UserError as error:
        return "", error_card(str(error))
    return image_card(shown), answer_card(shown)


def _blocks(demo: Demo, title: str, folder: Path, samples: Sequence[Path]) -> Any:
    import gradio

    with gradio.Blocks(title=f"deepmoe: {title}", analytics_enabled=False) as blocks:
        gradio.HTML(note_card("What ran for your image, and what it cost.", title))
        with gradio.Row():
            with gradio.Column(scale=2):
                image = gradio.File(label="Image", height=140, elem_id="image")
                if samples:
                    _choice(gradio, samples, image)
                inputs = [image, *_slider(gradio, demo)]
                seen = gradio.HTML(elem_id="seen")
            with gradio.Column(scale=3):
                answer = gradio.HTML(EMPTY, elem_id="answer")
        for changed in inputs:
            changed.change(
                partial(answered, demo, folder),
                inputs,
                [seen, answer],
                preprocess=False,  # what comes is looked at here
                api_visibility="private",
                trigger_mode="always_last",  # of a slider on its way, only the last place counts
                show_progress="minimal",
            )
    return blocks.queue(max_size=16, default_concurrency_limit=1)


def _choice(gradio: Any, samples: Sequence[Path], image: Any) -> None:
    """Images to take in place of an upload."""
    gradio.HTML(note_card("Or take one of these test images:"))
    gallery = gradio.Gallery(
        [str(path) for path in samples],
        columns=len(samples),
        show_label=False,
        container=False,
        height=70,
        allow_preview=False,
        interactive=False,
        buttons=[],
        elem_id="samples",
    )

    def take(chosen: gradio.SelectData) -> str | None:
        number = chosen.index
        return str(samples[number]) if number in range(len(samples)) else None

    gallery.select(take, None, image, api_visibility="private")


def _slider(gradio: Any, demo: Demo) -> list[Any]:
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
