//! Images in the messages of people. Only models of other servers see them.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::message::ChatMessage;

/// An image in a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Byte offset in the text of the message at which the image stands.
    pub at: usize,
    /// Index of the image among the parts of the content as its sender wrote them, which errors name.
    pub part: usize,
    pub source: ImageSource,
    /// The resolution at which the model looks at it; the server chooses by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<ImageDetail>,
}

/// The place where an image is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageSource {
    /// An address from which the server of the model fetches it. The host never does.
    Url(ImageText),
    Data {
        kind: ImageKind,
        base64: ImageText,
    },
}

/// A format of images that all servers read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageKind {
    Png,
    Jpeg,
    Gif,
    Webp,
}

/// The resolution at which a remote model reads an image, as OpenAI's field `detail` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageDetail {
    /// The model reads a small version of the image, which takes fewer tokens.
    Low,
    /// The model reads the image in detail.
    High,
}

/// A text of up to several megabytes, which clones share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct ImageText(Arc<str>);

/// A part of a message's content.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ContentPart<'a> {
    Text(&'a str),
    Image(&'a Image),
}

impl ImageKind {
    /// All formats that are accepted.
    pub const ALL: [ImageKind; 4] = [ImageKind::Png, ImageKind::Jpeg, ImageKind::Gif, ImageKind::Webp];

    /// Returns the media type that data URLs and requests to upstreams name, such as `image/png`.
    pub fn media_type(self) -> &'static str {
        match self {
            ImageKind::Png => "image/png",
            ImageKind::Jpeg => "image/jpeg",
            ImageKind::Gif => "image/gif",
            ImageKind::Webp => "image/webp",
        }
    }

    /// Returns the format of a file that begins with these bytes; twelve are enough.
    pub fn of_bytes(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [0x89, b'P', b'N', b'G', ..] => Some(ImageKind::Png),
            [0xff, 0xd8, 0xff, ..] => Some(ImageKind::Jpeg),
            [b'G', b'I', b'F', b'8', ..] => Some(ImageKind::Gif),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(ImageKind::Webp),
            _ => None,
        }
    }
}

impl ImageDetail {
    /// Returns the value of OpenAI's field `detail`.
    pub fn as_str(self) -> &'static str {
        match self {
            ImageDetail::Low => "low",
            ImageDetail::High => "high",
        }
    }
}

impl ImageSource {
    /// Returns the number of bytes that the source takes in a request.
    pub fn bytes(&self) -> usize {
        match self {
            ImageSource::Url(text) | ImageSource::Data { base64: text, .. } => text.as_str().len(),
        }
    }

    /// Returns the image as a URL, which begins with `data:` if the image is in the request.
    pub fn url(&self) -> Cow<'_, str> {
        match self {
            ImageSource::Url(url) => url.as_str().into(),
            ImageSource::Data { kind, base64 } => {
                format!("data:{};base64,{}", kind.media_type(), base64.as_str()).into()
            }
        }
    }

    /// Describes the image for the log of requests. The query of an address may be a secret, and is left out.
    fn note(&self) -> String {
        match self {
            ImageSource::Url(url) => {
                format!("[image at {}]", url.as_str().split(['?', '#']).next().unwrap_or_default())
            }
            ImageSource::Data { kind, base64 } => {
                format!("[{} of {} bytes]", kind.media_type(), base64.as_str().len() / 4 * 3)
            }
        }
    }
}

impl ImageText {
    /// Returns the URL or the base64 that the value holds.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for ImageText {
    fn from(text: String) -> Self {
        ImageText(text.into())
    }
}

impl From<ImageText> for String {
    fn from(text: ImageText) -> Self {
        text.as_str().to_owned()
    }
}

impl ChatMessage {
    /// Returns the texts and the images of the message in their order. No text is empty.
    pub fn parts(&self) -> Vec<ContentPart<'_>> {
        let mut parts = Vec::with_capacity(2 * self.images.len() + 1);
        let mut begin = 0;
        for image in &self.images {
            let end = self.content.floor_char_boundary(image.at).max(begin);
            parts.extend([ContentPart::Text(&self.content[begin..end]), ContentPart::Image(image)]);
            begin = end;
        }
        parts.push(ContentPart::Text(&self.content[begin..]));
        parts.retain(|part| *part != ContentPart::Text(""));
        parts
    }

    /// Returns the text, with a note in the place of each image.
    pub(crate) fn text_with_notes(&self) -> Cow<'_, str> {
        if self.images.is_empty() {
            return Cow::Borrowed(&self.content);
        }
        let texts = self.parts().into_iter().map(|part| match part {
            ContentPart::Text(text) => Cow::Borrowed(text),
            ContentPart::Image(image) => Cow::Owned(image.source.note()),
        });
        Cow::Owned(texts.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(at: usize, source: ImageSource) -> Image {
        Image { at, part: 0, source, detail: None }
    }

    #[test]
    fn texts_and_images_keep_their_order_whatever_the_offsets_are() {
        let url = |url: &str| ImageSource::Url(url.to_owned().into());
        let data = ImageSource::Data { kind: ImageKind::Png, base64: "iVBORw0KGgo=".to_owned().into() };
        let images = vec![image(0, url("https://a/1?key=x")), image(3, data)];
        let message = ChatMessage { images, ..ChatMessage::user("né?!") };
        let [ContentPart::Image(_), ContentPart::Text("né"), ContentPart::Image(_), ContentPart::Text("?!")] =
            message.parts()[..]
        else {
            panic!("{:?}", message.parts());
        };
        assert_eq!(message.text_with_notes(), "[image at https://a/1]né[image/png of 9 bytes]?!");
        assert_eq!(message.images[1].source.url(), "data:image/png;base64,iVBORw0KGgo=");
        // Offsets of an imported conversation may be anything.
        let images = vec![image(99, url("https://a")), image(2, url("https://b"))];
        let odd = ChatMessage { images, ..ChatMessage::user("né?!") };
        let [ContentPart::Text("né?!"), ContentPart::Image(_), ContentPart::Image(_)] = odd.parts()[..]
        else {
            panic!("{:?}", odd.parts());
        };
        let json = serde_json::to_string(&odd).expect("JSON");
        assert_eq!(serde_json::from_str::<ChatMessage>(&json).expect("a message"), odd);
    }
}
