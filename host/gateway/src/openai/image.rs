//! Reads images in the content of messages: parts of type `image_url`, with an `https://` address or a `data:` URL.

use crate::ApiError;
use axum::http::Uri;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::Value;
use skep_engine::chat::{ChatMessage, Image, ImageDetail, ImageKind, ImageSource};
use skep_runtime::excerpt;

/// Maximum number of images in one request.
pub(crate) const MAX_IMAGES: usize = 16;
/// Maximum size of the file of one image.
pub(crate) const MAX_IMAGE_BYTES: usize = 5 << 20;
/// Maximum size of the images of a request, for all its choices together: each choice is a request of its own.
const MAX_ALL_BYTES: usize = 32 << 20;
const MAX_ADDRESS_BYTES: usize = 8 << 10;
/// The first bytes of a file, which identify its format, in base64.
const MAGIC: usize = 16;

/// Reads a part of type `image_url`. `at` is the offset in the text of the message at which the image stands, and
/// `part` its index among the parts. The error says what is wrong, without the place.
pub(crate) fn read(image: &Value, at: usize, part: usize) -> Result<Image, String> {
    // Some clients send the address itself.
    let Some(url) = image["url"].as_str().or_else(|| image.as_str()) else {
        return Err("an image is {\"type\": \"image_url\", \"image_url\": {\"url\": …}}".to_owned());
    };
    let detail = match image["detail"].as_str() {
        None | Some("auto") => None,
        Some("low") => Some(ImageDetail::Low),
        Some("high") => Some(ImageDetail::High),
        Some(other) => return Err(format!("{other:?} is not a detail of an image; use auto, low or high")),
    };
    let source = match url.strip_prefix("data:") {
        Some(data) => embedded(data)?,
        None => address(url)?,
    };
    Ok(Image { at, part, source, detail })
}

/// Checks the number and the size of all images of a request with this number of choices.
pub(crate) fn check_all(messages: &[ChatMessage], choices: usize) -> Result<(), ApiError> {
    let images = || messages.iter().flat_map(|message| &message.images);
    let count = images().count();
    if count > MAX_IMAGES {
        let message = format!("the messages have {count} images; at most {MAX_IMAGES} are allowed");
        return Err(ApiError::parameter("messages", message));
    }
    let bytes: usize = images().map(|image| image.source.bytes()).sum();
    if bytes.saturating_mul(choices) > MAX_ALL_BYTES {
        let message = format!(
            "the images have {bytes} bytes, and each of the {choices} choices sends them; all together may have at \
             most {MAX_ALL_BYTES}"
        );
        return Err(ApiError::parameter("messages", message));
    }
    Ok(())
}

fn address(url: &str) -> Result<ImageSource, String> {
    const WANTED: &str = "an image must be at an https:// address, or in a data: URL";
    if url.len() > MAX_ADDRESS_BYTES {
        return Err(format!("the address of an image may have at most {MAX_ADDRESS_BYTES} bytes"));
    }
    let parsed: Uri = url.parse().map_err(|_| WANTED.to_owned())?;
    match parsed.authority() {
        Some(host) if parsed.scheme_str() == Some("https") && !host.as_str().contains('@') => {
            Ok(ImageSource::Url(url.to_owned().into()))
        }
        _ => Err(WANTED.to_owned()),
    }
}

/// Reads what follows `data:`.
fn embedded(data: &str) -> Result<ImageSource, String> {
    let types = || ImageKind::ALL.map(ImageKind::media_type).join(", ");
    let Some((media_type, base64)) = data.split_once(";base64,") else {
        return Err("an image in a data: URL must be in base64: data:image/png;base64,…".to_owned());
    };
    let named = ImageKind::ALL.into_iter().find(|kind| kind.media_type().eq_ignore_ascii_case(media_type));
    let Some(kind) = named else {
        let media_type = excerpt(media_type);
        return Err(format!("images of type {media_type:?} are not supported; the types are {}", types()));
    };
    let bytes = base64.len() / 4 * 3;
    if bytes > MAX_IMAGE_BYTES {
        return Err(format!("the image has {bytes} bytes; at most {MAX_IMAGE_BYTES} are allowed"));
    }
    let digits = base64.trim_end_matches('=');
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/');
    if base64.len() % 4 != 0 || base64.len() - digits.len() > 2 || !digits.bytes().all(is_digit) {
        return Err("the data of an image is not valid base64".to_owned());
    }
    let magic = base64.get(..MAGIC).and_then(|magic| BASE64_STANDARD.decode(magic).ok()).unwrap_or_default();
    match ImageKind::of_bytes(&magic) {
        Some(actual) if actual == kind => Ok(ImageSource::Data { kind, base64: base64.to_owned().into() }),
        Some(actual) => {
            let (named, actual) = (kind.media_type(), actual.media_type());
            Err(format!("the data of an image is {actual}, but its URL says {named}"))
        }
        None => Err(format!("the data of an image is of no known type; the types are {}", types())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn data(kind: &str, bytes: &[u8]) -> String {
        format!("data:{kind};base64,{}", BASE64_STANDARD.encode(bytes))
    }

    #[test]
    fn images_are_read_with_their_type_and_detail() {
        let png = data("image/png", b"\x89PNG\r\n\x1a\n....");
        let image = read(&json!({"url": png, "detail": "low"}), 3, 1).expect("an image");
        assert!(matches!(image.source, ImageSource::Data { kind: ImageKind::Png, .. }), "{image:?}");
        assert_eq!((image.source.url().as_ref(), image.at, image.part), (png.as_str(), 3, 1));
        assert_eq!(image.detail, Some(ImageDetail::Low));
        let url = "https://a.example:8443/cat.webp?signature=x";
        let image = read(&json!(url), 0, 0).expect("an image");
        assert_eq!((image.source.url().as_ref(), image.detail), (url, None));
    }

    #[test]
    fn invalid_images_are_refused_with_a_reason() {
        let large = data("image/jpeg", &[&[0xff, 0xd8, 0xff], &vec![0; MAX_IMAGE_BYTES][..]].concat());
        for (image, why) in [
            (json!({}), "an image is {\"type\": \"image_url\""),
            (json!({"url": "http://a.example/cat.png"}), "must be at an https:// address"),
            (json!({"url": "https://me:word@a.example/"}), "must be at an https:// address"),
            (json!({"url": "/etc/passwd"}), "must be at an https:// address"),
            (json!({"url": format!("https://a/{}", "x".repeat(9000))}), "at most 8192 bytes"),
            (json!({"url": "data:image/png,x"}), "must be in base64"),
            (json!({"url": data("image/svg+xml", b"<svg/>")}), "the types are image/png, image/jpeg"),
            (json!({"url": data("image/png", b"GIF89a......")}), "is image/gif, but its URL says image/png"),
            (json!({"url": data("image/png", b"nothing known")}), "of no known type"),
            (json!({"url": "data:image/png;base64,iVBORw0KG!=="}), "not valid base64"),
            (json!({"url": large}), "at most 5242880 are allowed"),
            (json!({"url": "https://a/b", "detail": "huge"}), "\"huge\" is not a detail"),
        ] {
            let error = read(&image, 0, 0).expect_err(why);
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn the_number_and_the_size_of_all_images_are_bounded() {
        let with = |count: usize, source: &ImageSource| {
            let image = Image { at: 0, part: 0, source: source.clone(), detail: None };
            [ChatMessage { images: vec![image; count], ..ChatMessage::user("") }]
        };
        let small = ImageSource::Url("https://a/b".to_owned().into());
        check_all(&with(MAX_IMAGES, &small), 16).expect("within bounds");
        check_all(&with(MAX_IMAGES + 1, &small), 1).expect_err("too many");
        let base64 = "A".repeat(6 << 20).into();
        let large = ImageSource::Data { kind: ImageKind::Png, base64 };
        check_all(&with(2, &large), 2).expect("within bounds");
        let error = check_all(&with(2, &large), 3).expect_err("too large");
        assert_eq!(error.param.as_deref(), Some("messages"));
    }
}
