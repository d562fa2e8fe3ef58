//! GLM 4.5 to 4.7: calls as a name and pairs of keys and values, whose values are strings or JSON by the tool's schema. From
//! 4.7 on, templates write no line breaks between them.

use super::{CallForm, CallIds, CallReading, HeadForm, Markup, Parameters, Part, Parts, Reading};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

const fn parameters(before_value: &'static str, after: &'static str) -> Part {
    Part::Parameters(Parameters {
        before_name: KEY,
        before_string: before_value,
        before_json: before_value,
        close: VALUE_END,
        space: ("", after),
    })
}

const fn markup(
    name: &'static str,
    signs: &'static [&'static [&'static str]],
    call: &'static [Part],
) -> Markup {
    Markup {
        name,
        signs,
        call: CallForm::Parts(Parts {
            before_text: &[],
            before: &[],
            call,
            between: &[Part::Gap("\n")],
            after: &[],
            only_first: false,
            many: true,
        }),
        reading: Reading::Calls(CallReading {
            sections: &[],
            opens: &[OPEN],
            head: HeadForm::Pairs,
            closers: &[],
            bare: false,
        }),
        tokens: &[OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END],
        reserved: &[CLOSE, KEY, KEY_END, VALUE, VALUE_END],
        ids: CallIds::Own,
        reasoning_field: "reasoning_content",
        declaration: None,
    }
}

const WITH_LINES: [Part; 5] = [
    Part::Text(OPEN),
    Part::Name,
    Part::Text("\n"),
    parameters("</arg_key>\n<arg_value>", "\n"),
    Part::Text(CLOSE),
];
const DENSE: [Part; 4] =
    [Part::Text(OPEN), Part::Name, parameters("</arg_key><arg_value>", ""), Part::Text(CLOSE)];

pub(super) static V45: Markup = markup("glm-4.5", &[&[OPEN, KEY, VALUE]], &WITH_LINES);

pub(super) static V47: Markup = markup("glm-4.7", &[&["<tool_call>{function-name}<arg_key>"]], &DENSE);
