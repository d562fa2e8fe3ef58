//! Harmony (gpt-oss): an answer is a sequence of messages, each in a channel. A call is a message to a tool in the channel
//! `commentary`, the text is in `final`, and the reasoning in `analysis`.

use super::{CallForm, CallIds, Markup, Part, Parts, Reading};

pub(in crate::chat) const START: &str = "<|start|>";
pub(in crate::chat) const CHANNEL: &str = "<|channel|>";
pub(in crate::chat) const MESSAGE: &str = "<|message|>";
pub(in crate::chat) const CONSTRAIN: &str = "<|constrain|>";
pub(in crate::chat) const END: &str = "<|end|>";
pub(in crate::chat) const CALL: &str = "<|call|>";
pub(in crate::chat) const RETURN: &str = "<|return|>";

pub(super) static MARKUP: Markup = Markup {
    name: "harmony",
    signs: &[&[START, CHANNEL, MESSAGE, "commentary"]],
    call: CallForm::Parts(Parts {
        before_text: &[Part::Text(CHANNEL), Part::Text("final"), Part::Text(MESSAGE)],
        before: &[],
        call: &[
            Part::Text(CHANNEL),
            Part::Text("commentary to=functions."),
            Part::Name,
            Part::Text(" "),
            Part::Text(CONSTRAIN),
            Part::Text("json"),
            Part::Text(MESSAGE),
            Part::Arguments,
        ],
        between: &[],
        after: &[],
        only_first: false,
        // The token after a call ends the answer.
        many: false,
    }),
    reading: Reading::Harmony,
    tokens: &[START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN],
    reserved: &[],
    ids: CallIds::Own,
    reasoning_field: "thinking",
    declaration: None,
};
