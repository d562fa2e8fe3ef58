//! Listings.

use crate::{
    AgentVersion, Approval, Batch, ClientFile, DeadLetter, Event, Key, LogLine, McpServer, Model, Schedule,
    Secret, Session, StateValue, Tenant, TurnSummary, WebhookState, marker,
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
/// All approvals that wait.
pub type ApprovalList<J = Value> = List<Approval<J>>;
/// A page of batches.
pub type BatchPage = Page<Batch>;
/// A page of files.
pub type ClientFilePage = Page<ClientFile>;
/// A page of deliveries that failed permanently.
pub type DeadLetterPage = Page<DeadLetter>;
/// A page of events.
pub type EventPage<J = Value> = Page<Event<J>>;
/// All API keys.
pub type KeyList = List<Key>;
/// Log lines of an agent.
pub type LogLineList = List<LogLine>;
/// All MCP servers.
pub type McpServerList = List<McpServer>;
/// All models.
pub type ModelList = List<Model>;
/// A page of schedules.
pub type SchedulePage<J = Value> = Page<Schedule<J>>;
/// All secrets, without their values.
pub type SecretList = List<Secret>;
/// All tenants.
pub type TenantList = List<Tenant>;
/// A page of the sessions of an agent.
pub type SessionPage = Page<Session>;
/// A page of the values of a session's state.
pub type StateValuePage = Page<StateValue>;
/// A page of the turns of a session.
pub type TurnSummaryPage = Page<TurnSummary>;
/// All versions of an agent.
pub type VersionList = List<AgentVersion>;
/// A page of webhooks.
pub type WebhookPage = Page<WebhookState>;

impl<T> List<T> {
    /// Creates a list of everything there is.
    pub fn new(data: impl IntoIterator<Item = T>) -> Self {
        List { object: marker::List, data: data.into_iter().collect() }
    }
}

impl<T> Page<T> {
    /// Creates a page. `has_more` tells whether another one follows it.
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
