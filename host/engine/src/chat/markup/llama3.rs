//! Llama 3.1 to 3.3: an answer that is one call is a JSON object with `name` and `parameters`.

use super::{CallForm, CallIds, CallReading, HeadForm, Markup, Part, Parts, Reading};

pub(super) static MARKUP: Markup = Markup {
    name: "llama3",
    signs: &[&["<|start_header_id|>", "\"parameters\": "], &["<|start_header_id|>", "<|python_tag|>"]],
    call: CallForm::Parts(Parts {
        before_text: &[],
        before: &[],
        call: &[
            Part::Text("{\"name\": \""),
            Part::Name,
            Part::Text("\", \"parameters\": "),
            Part::Arguments,
            Part::Text("}"),
        ],
        between: &[],
        after: &[],
        only_first: true,
        many: false,
    }),
    reading: Reading::Calls(CallReading {
        sections: &[],
        opens: &["<|python_tag|>"],
        head: HeadForm::Object,
        closers: &[";", "<|eom_id|>", "<|eot_id|>"],
        bare: true,
    }),
    tokens: &["<|python_tag|>"],
    reserved: &[],
    ids: CallIds::Own,
    reasoning_field: "reasoning_content",
    declaration: None,
};
