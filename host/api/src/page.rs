//! Listings.

use crate::{
    AgentVersion, Approval, Batch, ClientFile, DeadLetter, Event, Key, LogLine, McpServer, Model,
    RecentSession, Schedule, Secret, Session, StateValue, TurnSummary, WebhookState, marker,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        Ref, RefOr, Schema,
        schema::{ArrayBuilder, ObjectBuilder, Type},
    },
};

/// A whole listing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct List<T> {
    pub object: marker::List,
    pub data: Vec<T>,
}

/// One page of a listing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Page<T> {
    pub object: marker::List,
    pub data: Vec<T>,
    /// Whether the listing continues after this page.
    pub has_more: bool,
}

// The OpenAPI document names a schema after the type that a route mentions, so each listing has a name of its own.
pub type ApprovalList<J = Value> = List<Approval<J>>;
pub type BatchPage = Page<Batch>;
pub type ClientFilePage = Page<ClientFile>;
pub type DeadLetterPage = Page<DeadLetter>;
pub type EventPage<J = Value> = Page<Event<J>>;
pub type KeyList = List<Key>;
pub type LogLineList = List<LogLine>;
pub type McpServerList = List<McpServer>;
pub type ModelList = List<Model>;
pub type RecentSessionPage = Page<RecentSession>;
pub type SchedulePage<J = Value> = Page<Schedule<J>>;
pub type SecretList = List<Secret>;
pub type SessionPage = Page<Session>;
pub type StateValuePage = Page<StateValue>;
pub type TurnSummaryPage = Page<TurnSummary>;
pub type VersionList = List<AgentVersion>;
pub type WebhookPage = Page<WebhookState>;

impl<T> List<T> {
    pub fn new(data: impl IntoIterator<Item = T>) -> Self {
        List { object: marker::List, data: data.into_iter().collect() }
    }
}

impl<T> Page<T> {
    pub fn new(data: impl IntoIterator<Item = T>, has_more: bool) -> Self {
        Page { object: marker::List, data: data.into_iter().collect(), has_more }
    }
}

// Derived schemas of generic types would repeat the schema of `T` instead of referring to it.

impl<T: ToSchema> PartialSchema for List<T> {
    fn schema() -> RefOr<Schema> {
        RefOr::T(Schema::Object(listing::<T>().description(Some("A whole listing.")).build()))
    }
}

impl<T: ToSchema> ToSchema for List<T> {
    fn name() -> Cow<'static, str> {
        format!("{}List", T::name()).into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        with_own(schemas, T::name(), T::schema(), T::schemas);
    }
}

impl<T: ToSchema> PartialSchema for Page<T> {
    fn schema() -> RefOr<Schema> {
        let has_more = ObjectBuilder::new()
            .schema_type(Type::Boolean)
            .description(Some("Whether the listing continues after this page."));
        let page = listing::<T>().property("has_more", has_more).required("has_more");
        RefOr::T(Schema::Object(page.description(Some("One page of a listing.")).build()))
    }
}

impl<T: ToSchema> ToSchema for Page<T> {
    fn name() -> Cow<'static, str> {
        format!("{}Page", T::name()).into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        with_own(schemas, T::name(), T::schema(), T::schemas);
    }
}

fn listing<T: ToSchema>() -> ObjectBuilder {
    let data = ArrayBuilder::new().items(Ref::from_schema_name(T::name()));
    let listing = ObjectBuilder::new().property("object", marker::List::schema()).property("data", data);
    listing.required("object").required("data")
}

/// Adds the schema of a type and those that it refers to.
pub(crate) fn with_own(
    schemas: &mut Vec<(String, RefOr<Schema>)>,
    name: Cow<'static, str>,
    schema: RefOr<Schema>,
    others: impl FnOnce(&mut Vec<(String, RefOr<Schema>)>),
) {
    schemas.push((name.into_owned(), schema));
    others(schemas);
}
