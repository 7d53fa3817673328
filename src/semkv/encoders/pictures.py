"""Image files to pixels, as vLLM (0.26 to 0.33) reads them by default: two files that it shows its model alike are
alike here, and two that it shows differently are not."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

READING = "upright, on white"
"""Names this way of reading, in the keys of all that is computed from it. To be changed with it."""

_MOST_PIXELS = 178_956_970  # vLLM's own bound, and Pillow's
# In vLLM's order: some formats have no sign of their own, and the first that reads a file decides. Left out are those
# that start other programs (EPS), ask for drivers, or are no pictures.
_FORMATS = (
    "AVIF BLP BMP CUR DCX DDS DIB FITS FLI FTEX GBR GIF ICNS ICO IM IMT IPTC JPEG JPEG2000 MCIDAS MSP PCD PCX PIXAR PNG"
    " PPM PSD QOI SGI SPIDER SUN TGA TIFF WEBP XBM XPM XVTHUMB"
).split()


def read_picture(data: bytes, *, most_pixels: int = _MOST_PIXELS) -> Image:
    """The picture in RGB: turned as its EXIF orientation says, what is transparent on white, the first of several
    frames. Colour profiles are not applied.

    Raises:
        OSError: the bytes are no picture that can be read, or one of more than ``most_pixels``, whatever else is
            wrong with them: Pillow's readers raise nearly any exception.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        Image.init()
        image = Image.open(io.BytesIO(data), formats=[name for name in _FORMATS if name in Image.OPEN])
        if image.width * image.height > most_pixels:  # the header alone has been read
            raise OSError(f"a picture of {image.width} x {image.height} pixels, of at most {most_pixels}")
        with contextlib.suppress(Exception):  # damaged EXIF data: the picture stays as it lies in the file
            image = ImageOps.exif_transpose(image)
        image.load()
        return _rgb(image)
    except UnidentifiedImageError:
        raise OSError("no picture in a format that is read") from None
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _rgb(image: Image) -> Image:
    if image.mode == "RGB":
        return image  # with a transparent colour, too
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    from PIL import Image

    colors = image.convert("RGBA")
    page = Image.new("RGB", colors.size, (255, 255, 255))
    page.paste(colors, mask=colors.getchannel("A"))
    return page
