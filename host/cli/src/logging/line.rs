//! A log line for people: time, level, the turn that it belongs to, and the event. The other fields of its
//! spans are only in the JSON log and in traces.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Span fields that are shown, each with its short name.
const SHOWN: [(&str, &str); 3] =
    [("gen_ai.agent.name", "agent"), ("gen_ai.conversation.id", "session"), ("skep.turn.number", "turn")];

/// Formats the span fields that identify an agent, a session and a turn.
pub(super) struct TurnFields;

impl<'writer> FormatFields<'writer> for TurnFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut shown = FieldWriter { writer, result: Ok(()) };
        fields.record(&mut shown);
        shown.result
    }
}

struct FieldWriter<'writer> {
    writer: Writer<'writer>,
    result: fmt::Result,
}

impl Visit for FieldWriter<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if let Some((_, name)) = SHOWN.iter().find(|(known, _)| *known == field.name()) {
            self.result = self.result.and_then(|()| write!(self.writer, " {name}={value:?}"));
        }
    }
}

/// Formats a whole line.
pub(super) struct HumanFormat;

impl<S, N> FormatEvent<S, N> for HumanFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        SystemTime.format_time(&mut writer)?;
        let level = *event.metadata().level();
        let color = match level {
            tracing::Level::ERROR => 31,
            tracing::Level::WARN => 33,
            tracing::Level::INFO => 32,
            _ => 34,
        };
        match writer.has_ansi_escapes() {
            true => write!(writer, " \x1b[{color}m{level:>5}\x1b[0m")?,
            false => write!(writer, " {level:>5}")?,
        }
        let shown = turn_fields(context);
        for field in &shown {
            write!(writer, " {field}")?;
        }
        let mut rest = Rest { writer: writer.by_ref(), shown: &shown, result: Ok(()) };
        event.record(&mut rest);
        rest.result?;
        writeln!(writer)
    }
}

/// Writes the message and the fields of an event, except those that the line has shown already.
struct Rest<'a> {
    writer: Writer<'a>,
    shown: &'a [String],
    result: fmt::Result,
}

impl Visit for Rest<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.record_debug(field, &((value * 10.0).round() / 10.0));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let written = match field.name() {
            "message" => format!("{value:?}"),
            name => format!("{name}={value:?}"),
        };
        // Lines of other libraries come with fields about their origin.
        if self.shown.contains(&written) || field.name().starts_with("log.") {
            return;
        }
        let name = written.strip_prefix(field.name()).and_then(|rest| rest.strip_prefix('='));
        self.result = self.result.and_then(|()| match name {
            Some(value) if self.writer.has_ansi_escapes() => {
                write!(self.writer, " \x1b[3m{}\x1b[0m\x1b[2m=\x1b[0m{value}", field.name())
            }
            _ => write!(self.writer, " {written}"),
        });
    }
}

/// Returns each field once, from the innermost span that has it: a turn may run inside another one.
fn turn_fields<S, N>(context: &FmtContext<'_, S, N>) -> Vec<String>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    let mut found: Vec<(&str, String)> = Vec::new();
    for span in context.event_scope().into_iter().flatten() {
        let extensions = span.extensions();
        let Some(fields) = extensions.get::<FormattedFields<N>>() else { continue };
        // Names of agents and sessions contain no spaces.
        for field in fields.fields.split_whitespace() {
            let name =
                field.split_once('=').and_then(|(name, _)| SHOWN.iter().find(|(_, known)| *known == name));
            if let Some((_, name)) = name
                && !found.iter().any(|(known, _)| known == name)
            {
                found.push((name, field.to_owned()));
            }
        }
    }
    found.sort_by_key(|(name, _)| SHOWN.iter().position(|(_, known)| known == name));
    found.into_iter().map(|(_, field)| field).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::{Value, json};
    use tracing::field::Empty;
    use tracing_subscriber::fmt::MakeWriter;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Buffer {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().expect("no writer panicked").clone()).expect("UTF-8")
        }
    }

    impl std::io::Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no writer panicked").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl MakeWriter<'_> for Buffer {
        type Writer = Buffer;
        fn make_writer(&self) -> Buffer {
            self.clone()
        }
    }

    #[test]
    fn a_text_line_shows_agent_session_and_turn_and_no_other_span_fields() {
        let written = Buffer::default();
        let lines =
            tracing_subscriber::fmt().with_ansi(false).fmt_fields(TurnFields).event_format(HumanFormat);
        tracing::subscriber::with_default(lines.with_writer(written.clone()).finish(), || {
            let request = tracing::info_span!("request", otel.kind = "server", request_id = "r1").entered();
            let turn = tracing::info_span!(
                "turn",
                gen_ai.agent.name = "desk",
                gen_ai.conversation.id = "room-7",
                skep.turn.number = Empty,
            );
            turn.record("skep.turn.number", 3);
            turn.in_scope(|| {
                let generation = tracing::info_span!(
                    "generation",
                    gen_ai.agent.name = "desk",
                    gen_ai.request.model = "tiny",
                );
                generation.in_scope(|| tracing::warn!(code = "busy", "it waits"));
                tracing::info!(
                    agent = "desk",
                    session = "room-7",
                    turn = 3,
                    ms = 1153.3120669999998,
                    "logged"
                );
                tracing::info!(agent = "orders", "about another");
                let inner = tracing::info_span!("turn", gen_ai.agent.name = "orders", skep.turn.number = 1);
                inner.in_scope(|| tracing::info!("hello"));
            });
            drop(request);
            tracing::info!("nobody's");
        });
        let written = written.text();
        let lines: Vec<&str> =
            written.lines().map(|line| line.split_once(' ').expect("the time").1).collect();
        assert_eq!(
            lines,
            [
                " WARN agent=\"desk\" session=\"room-7\" turn=3 it waits code=\"busy\"",
                " INFO agent=\"desk\" session=\"room-7\" turn=3 logged ms=1153.3",
                " INFO agent=\"desk\" session=\"room-7\" turn=3 about another agent=\"orders\"",
                " INFO agent=\"orders\" session=\"room-7\" turn=1 hello",
                " INFO nobody's",
            ]
        );
    }

    #[test]
    fn a_json_line_has_each_field_once() {
        let written = Buffer::default();
        let lines = tracing_subscriber::registry().with(crate::logging::json_lines(written.clone()));
        tracing::subscriber::with_default(lines, || {
            let _request = tracing::info_span!("request", request_id = "r1").entered();
            let turn = tracing::info_span!("turn", gen_ai.agent.name = "desk", skep.turn.number = Empty);
            turn.record("skep.turn.number", 3);
            turn.in_scope(|| tracing::warn!(code = "busy", "it waits"));
        });
        let line = written.text();
        let parsed: Value = serde_json::from_str(&line).expect("one JSON object");
        let spans = json!([{"name": "request", "request_id": "r1"},
            {"name": "turn", "gen_ai.agent.name": "desk", "skep.turn.number": 3}]);
        assert_eq!(
            (&parsed["message"], &parsed["code"], &parsed["spans"]),
            (&json!("it waits"), &json!("busy"), &spans)
        );
        let fields = ["timestamp", "level", "message", "code", "target", "spans"];
        assert_eq!(parsed.as_object().expect("an object").len(), fields.len(), "{line}");
        for field in [&fields[..], &["request_id", "gen_ai.agent.name", "skep.turn.number"]].concat() {
            assert_eq!(line.matches(&format!("\"{field}\":")).count(), 1, "{field} in {line}");
        }
    }
}
