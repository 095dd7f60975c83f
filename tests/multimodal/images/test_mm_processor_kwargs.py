"""``--mm-processor-kwargs``: what transformers' processors take is used, accepted as it is, or refused with a list."""

import json

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import VideosKwargs

from trencadis.core.errors import StartupError
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import KNOWN_KEYS, server_options
from trencadis.multimodal.pixel_normalisation_and_fixed_point import CLIP_MEAN, CLIP_STD
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor
from trencadis.multimodal.qwen2_vl.smart_resize import image_needs, pixel_limits
from trencadis.server.cli.main import main


@pytest.fixture(params=["preprocessor_config.json", "processor_config.json"])
def folder(tmp_path, request):
    raw = {"min_pixels": 3136, "max_pixels": 50176}
    inner = raw if request.param.startswith("pre") else {"image_processor": raw}
    (tmp_path / request.param).write_text(json.dumps(inner))
    return tmp_path


def test_every_key_of_the_reference_is_known():
    reference = set(Qwen2VLImageProcessorPil.valid_kwargs.__annotations__) | set(VideosKwargs.__annotations__)
    reference |= {"min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens"}  # its video processor's own
    assert {"fps", "do_rescale", "size", "min_frames"} < reference <= set(KNOWN_KEYS)


@pytest.mark.parametrize(
    ("kwargs", "pixels", "videos"),
    [
        ({"min_pixels": 3136, "max_pixels": 40000, "fps": 1}, {"min_pixels": 3136, "max_pixels": 40000}, {"fps": 1.0}),
        ({"do_rescale": True, "do_normalize": True, "do_resize": True, "do_convert_rgb": True}, {}, {}),
        ({"rescale_factor": 1 / 255, "image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD)}, {}, {}),
        ({"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "resample": 3, "do_pad": False}, {}, {}),
        ({"size": {"longest_edge": 40000}}, {"max_pixels": 40000}, {}),
        ({"images_kwargs": {"max_pixels": 40000}}, {"max_pixels": 40000}, {}),
        ({"videos_kwargs": {"max_pixels": 40000, "num_frames": 4}}, {}, {"max_pixels": 40000, "nframes": 4}),
        ({"fps": 1, "videos_kwargs": {"num_frames": 4}}, {}, {"nframes": 4}),
        ({"min_frames": 2, "max_frames": 8, "min_pixels": None}, {}, {"min_frames": 2, "max_frames": 8}),
    ],
    ids=str,
)
def test_what_a_server_accepts(folder, kwargs, pixels, videos):
    found = server_options(kwargs)
    assert (found.pixels, found.videos.given) == (pixels, videos)
    made = Qwen2VLImageProcessor.from_checkpoint(folder, kwargs)
    want = pixels.get("min_pixels", 3136), pixels.get("max_pixels", 50176)
    assert (made.min_pixels, made.max_pixels) == pixel_limits(folder, kwargs) == want
    assert image_needs(folder, kwargs).tokens == made.largest_tokens


@pytest.mark.parametrize(
    ("kwargs", "part"),
    [
        ({"crop": 3}, "unknown key 'crop'; accepted are cap_pixels_per_frame, "),
        ({"crop_size": 3}, "cannot honour crop_size=3"),
        ({"do_rescale": False}, "cannot honour do_rescale=False"),
        ({"fps": "fast"}, "fps must be a number"),
        ({"images_kwargs": {"do_resize": False}}, "cannot honour do_resize=False"),
        ({"image_mean": [0.5, 0.5, 0.5]}, "is not the checkpoint's [0.48145466"),
        ({"rescale_factor": 1}, "rescale_factor=1 is not the checkpoint's 0.0039"),
        ({"videos_kwargs": {"patch_size": 16}}, "patch_size=16 is not the checkpoint's 14"),
        ({"resized_height": 56, "resized_width": 56}, "the key of a request 'resized_height'; accepted are"),
        ({"images_kwargs": 4}, "must be an object"),
        ({"min_pixels": 401408}, "min_pixels=401408 and max_pixels=50176 contradict"),
        ({"max_pixels": 1}, "contradict"),
        ({"max_pixels": "many"}, "max_pixels must be a whole number"),
    ],
    ids=str,
)
def test_what_a_server_refuses(folder, kwargs, part):
    with pytest.raises(StartupError) as caught:
        Qwen2VLImageProcessor.from_checkpoint(folder, kwargs)
    assert part in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kwargs", ['{"min_pixels":401408}', '{"crop":1}', '{"image_std":[1,1,1]}', '{"fps":-1}'])
def test_plan_refuses_what_serve_refuses(kwargs, capsys):
    assert main(["plan", "--device", "hpu", "--memory", "96GiB", "--mm-processor-kwargs", kwargs]) == 2
    assert "contradict" in (err := capsys.readouterr().err) or "mm-processor-kwargs" in err


def test_a_trace_has_the_images_of_the_server(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text('{"arrival": 0, "prompt": 9, "output": 2, "images": [[1920, 1080]]}\n')

    def slots(*words):
        line = ["plan", "--device", "hpu", "--memory", "96GiB", "--trace", f"{tmp_path}/t.jsonl", "--json", *words]
        assert main(line) == 0
        found = json.loads(capsys.readouterr().out)
        image = next(i for i in found["images"] if i["size"] == "1920x1080")
        return found["trace"]["real"]["slots"], image["slots"]

    own, listed = slots()
    assert own == listed < 1000
    fewer, listed = slots("--mm-processor-kwargs", '{"max_pixels": 20000}')
    assert fewer == listed < own
