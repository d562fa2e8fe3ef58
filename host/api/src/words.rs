//! Strings with a fixed set of values.

use utoipa::openapi::{
    RefOr,
    schema::{ObjectBuilder, Schema, Type},
};

/// Defines an enum of words. A word that this version does not know is kept as it is.
macro_rules! words {
    ($(#[doc = $about:literal])* pub enum $name:ident { $($(#[$note:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[doc = $about])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub enum $name {
            $($(#[$note])* $variant,)+
            /// A word of a newer host.
            Other(String),
        }

        impl $name {
            /// Returns the word.
            pub fn as_str(&self) -> &str {
                match self {
                    $($name::$variant => $word,)+
                    $name::Other(word) => word,
                }
            }
        }

        impl From<&str> for $name {
            fn from(word: &str) -> Self {
                match word {
                    $($word => $name::$variant,)+
                    other => $name::Other(other.to_owned()),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                Ok($name::from(&*word))
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                $crate::words::one_of(&[$($word),+], Some(concat!($($about),*).trim()))
            }
        }

        impl utoipa::ToSchema for $name {}
    };
}

/// Defines a type for each name, whose only value is a word: the `object` that says what a JSON object is.
macro_rules! markers {
    ($($name:ident = $word:literal,)+) => {
        $(
            #[doc = concat!("The word `", $word, "`.")]
            #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
            pub struct $name;

            impl serde::Serialize for $name {
                fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    serializer.serialize_str($word)
                }
            }

            impl<'de> serde::Deserialize<'de> for $name {
                fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    serde::de::IgnoredAny::deserialize(deserializer).map(|_| $name)
                }
            }

            impl utoipa::PartialSchema for $name {
                fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                    super::one_of(&[$word], None)
                }
            }

            impl utoipa::ToSchema for $name {}
        )+
    };
}

pub(crate) use words;

/// Types with a single value, which say what a JSON object is. A client does not check them.
pub mod marker {
    markers! {
        Agent = "agent",
        ApiKey = "api_key",
        Caller = "caller",
        Approval = "approval",
        Assistant = "assistant",
        Batch = "batch",
        ChatChunk = "chat.completion.chunk",
        ChatCompletion = "chat.completion",
        Config = "config",
        ConfigReload = "config.reload",
        DeadLetter = "dead_letter",
        DeletedTenant = "tenant.deleted",
        Engine = "engine",
        EngineLoad = "engine.load",
        Error = "error",
        Event = "event",
        File = "file",
        Function = "function",
        Held = "held",
        KvDisk = "kv_disk",
        KvPageOwners = "kv_pages",
        Limits = "limits",
        List = "list",
        McpServer = "mcp_server",
        Message = "message",
        Model = "model",
        ModelRequest = "model_request",
        Ok = "ok",
        Ready = "ready",
        Response = "response",
        Schedule = "schedule",
        SchemaCheck = "schema_check",
        Secret = "secret",
        Session = "session",
        SessionPin = "session.pin",
        Status = "status",
        Tenant = "tenant",
        TextCompletion = "text_completion",
        Timeline = "timeline",
        Turn = "turn",
        Accepted = "accepted",
        Version = "agent.version",
        UsageReport = "usage_report",
        WarmedSession = "session.warmed",
        Webhook = "webhook",
        WebhookTest = "webhook_test",
    }
}

/// Returns the schema of a string with one of these values.
pub(crate) fn one_of(words: &[&str], about: Option<&str>) -> RefOr<Schema> {
    let text = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(words.iter().copied()));
    RefOr::T(Schema::Object(text.description(about).build()))
}

#[cfg(test)]
mod tests {
    use crate::{ScheduleState, marker};
    use serde_json::json;

    #[test]
    fn an_unknown_word_is_kept() {
        for (word, state) in
            [("failed", ScheduleState::Failed), ("postponed", ScheduleState::Other("postponed".to_owned()))]
        {
            let read: ScheduleState = serde_json::from_value(json!(word)).unwrap();
            assert_eq!(read, state);
            assert_eq!(serde_json::to_value(&read).unwrap(), word);
            assert_eq!(read.to_string(), word);
        }
        assert!(serde_json::from_value::<ScheduleState>(json!(7)).is_err());
    }

    #[test]
    fn a_marker_is_written_as_its_word_and_not_checked() {
        assert_eq!(serde_json::to_value(marker::Version).unwrap(), "agent.version");
        assert!(serde_json::from_value::<marker::Version>(json!("agent.version.2")).is_ok());
    }
}
