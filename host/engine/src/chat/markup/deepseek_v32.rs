//! DeepSeek V3.2 and V4 (DSML): calls as tags with one parameter each, which say whether their value is a string.

use super::{CallForm, CallIds, CallReading, HeadForm, Markup, Parameters, Part, Parts, Reading};

const SECTION: &str = "<｜DSML｜function_calls>";
const SECTION_V4: &str = "<｜DSML｜tool_calls>";
const INVOKE: &str = "<｜DSML｜invoke name=\"";
const INVOKE_END: &str = "</｜DSML｜invoke>";
const PARAMETER_END: &str = "</｜DSML｜parameter>";

const CALL: [Part; 5] = [
    Part::Text(INVOKE),
    Part::Name,
    Part::Text("\">\n"),
    Part::Parameters(Parameters {
        before_name: "<｜DSML｜parameter name=\"",
        before_string: "\" string=\"true\">",
        before_json: "\" string=\"false\">",
        close: PARAMETER_END,
        space: ("", "\n"),
    }),
    Part::Text("</｜DSML｜invoke>\n"),
];

const fn markup(name: &'static str, signs: &'static [&'static [&'static str]], parts: Parts) -> Markup {
    Markup {
        name,
        signs,
        call: CallForm::Parts(parts),
        reading: Reading::Calls(CallReading {
            sections: &[SECTION, SECTION_V4],
            opens: &[INVOKE],
            head: HeadForm::Invoke,
            closers: &["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"],
            bare: false,
        }),
        tokens: &["｜DSML｜"],
        reserved: &[INVOKE, INVOKE_END, PARAMETER_END],
        ids: CallIds::Own,
        reasoning_field: "reasoning_content",
        declaration: None,
    }
}

pub(super) static V32: Markup = markup(
    "deepseek-v3.2",
    &[&["｜DSML｜", "function_calls>"]],
    Parts {
        before_text: &[],
        before: &[Part::Text("<｜DSML｜function_calls>\n")],
        call: &CALL,
        between: &[],
        after: &[Part::Text("</｜DSML｜function_calls>")],
        only_first: false,
        many: true,
    },
);

pub(super) static V4: Markup = markup(
    "deepseek-v4",
    &[&["｜DSML｜", "tool_calls>"]],
    Parts {
        before_text: &[],
        before: &[Part::Text("<｜DSML｜tool_calls>\n")],
        call: &CALL,
        between: &[],
        after: &[Part::Text("</｜DSML｜tool_calls>")],
        only_first: false,
        many: true,
    },
);
