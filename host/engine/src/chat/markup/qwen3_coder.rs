//! Qwen3-Coder and Qwen 3.5: calls as tags with one parameter each, whose values are strings or JSON by the tool's schema.

use super::{CallForm, CallIds, CallReading, HeadForm, Markup, Parameters, Part, Parts, Reading};

pub(super) static MARKUP: Markup = Markup {
    name: "qwen3-coder",
    signs: &[&["<tool_call>", "<function=", "<parameter="]],
    call: CallForm::Parts(Parts {
        before_text: &[],
        before: &[],
        call: &[
            Part::Text("<tool_call>\n<function="),
            Part::Name,
            Part::Text(">\n"),
            Part::Parameters(Parameters {
                before_name: "<parameter=",
                before_string: ">\n",
                before_json: ">\n",
                close: "</parameter>",
                space: ("\n", "\n"),
            }),
            Part::Text("</function>\n</tool_call>"),
        ],
        between: &[Part::Gap("\n")],
        after: &[],
        only_first: false,
        many: true,
    }),
    reading: Reading::Calls(CallReading {
        sections: &["<tool_call>"],
        opens: &["<function="],
        head: HeadForm::Function,
        closers: &["</tool_call>"],
        bare: false,
    }),
    tokens: &["<tool_call>", "</tool_call>"],
    reserved: &["<function=", "</function>", "</tool_call>"],
    ids: CallIds::Own,
    reasoning_field: "reasoning_content",
    declaration: None,
};
