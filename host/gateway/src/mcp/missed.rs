//! Tells a client what it may have missed in its session's own stream while no host had the session.
//!
//! The notifications of that stream say that something may have changed, so a client that may have missed some gets one
//! that says that everything may have. Log lines are not repeated; they are in the agent's log.

// Subscriptions belong to the revisions with sessions.
#![allow(deprecated)]

use super::records::Kept;
use rmcp::{
    model::{
        Notification, PromptListChangedNotification, ResourceListChangedNotification,
        ResourceUpdatedNotificationParam, ServerJsonRpcMessage, ServerNotification,
        ToolListChangedNotification,
    },
    transport::streamable_http_server::session::ServerSseMessage,
};

/// Returns the notifications for a client whose session continues at this host.
pub(super) fn while_away(kept: Option<Kept>) -> Vec<ServerSseMessage> {
    let lists = [
        ServerNotification::ToolListChangedNotification(ToolListChangedNotification::default()),
        ServerNotification::PromptListChangedNotification(PromptListChangedNotification::default()),
        ServerNotification::ResourceListChangedNotification(ResourceListChangedNotification::default()),
    ];
    let watched = kept.map(|kept| kept.subscriptions).unwrap_or_default().into_iter();
    let updates = watched.map(|uri| {
        let update = Notification::new(ResourceUpdatedNotificationParam::new(uri));
        ServerNotification::ResourceUpdatedNotification(update)
    });
    let all = lists.into_iter().chain(updates);
    all.map(|news| ServerSseMessage::from_message(ServerJsonRpcMessage::notification(news))).collect()
}
