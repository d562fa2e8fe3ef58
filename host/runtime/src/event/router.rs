//! Routes events to their subscribers: the triggers of active agents, and the webhooks.

use super::{EventTrigger, TopicPattern};
use crate::{Json, RuntimeError, Tenant};
use serde_json::Value;
use skep_store::{NewDelivery, Target};
use std::{
    collections::BTreeMap,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

/// Maximum number of triggers and webhooks of one host, and therefore of deliveries of one event.
const MAX_SUBSCRIPTIONS: usize = 1_000;

#[derive(Debug, Default)]
pub(crate) struct EventRouter(RwLock<Subscriptions>);

#[derive(Debug, Default)]
struct Subscriptions {
    agents: BTreeMap<String, Vec<EventTrigger>>,
    /// Topics by webhook id.
    webhooks: BTreeMap<String, Vec<TopicPattern>>,
}

impl EventRouter {
    /// Returns the deliveries of an event: to sessions of its own tenant, and to the operator's
    /// webhooks.
    pub(crate) fn route(
        &self,
        principal: &str,
        id: &str,
        topic: &str,
        data: Option<&Json>,
    ) -> Vec<NewDelivery> {
        let subscriptions = self.read();
        let takes = |trigger: &&EventTrigger| trigger.topic.matches(topic);
        let mut takers = subscriptions.agents.values().flatten().filter(takes);
        // Data that is nested too deeply to parse counts as having no fields.
        let data: Option<Value> = if takers.any(|trigger| trigger.session.reads_data()) {
            data.and_then(|data| data.read().ok())
        } else {
            None
        };
        let mut deliveries: Vec<NewDelivery> = Vec::new();
        for (agent, triggers) in &subscriptions.agents {
            for trigger in triggers.iter().filter(takes) {
                let (session, undeliverable) = match session_of(trigger, principal, id, topic, data.as_ref())
                {
                    Ok(session) => (session, None),
                    Err(why) => (String::new(), Some(why)),
                };
                let target = Target::Session { agent: agent.clone(), session };
                // Two triggers of an agent that name the same session are one subscription.
                if !deliveries.iter().any(|delivery| delivery.target == target) {
                    deliveries.push(NewDelivery { target, undeliverable });
                }
            }
        }
        let webhooks = subscriptions.webhooks.iter();
        let webhooks = webhooks.filter(|(_, topics)| topics.iter().any(|pattern| pattern.matches(topic)));
        deliveries.extend(
            webhooks.map(|(id, _)| NewDelivery { target: Target::Webhook(id.clone()), undeliverable: None }),
        );
        deliveries
    }

    /// Returns whether any subscriber receives events of this topic.
    pub(crate) fn takes(&self, topic: &str) -> bool {
        let subscriptions = self.read();
        let mut triggers = subscriptions.agents.values().flatten();
        let mut topics = subscriptions.webhooks.values().flatten();
        triggers.any(|trigger| trigger.topic.matches(topic)) || topics.any(|pattern| pattern.matches(topic))
    }

    pub(crate) fn set_agent(&self, agent: &str, triggers: &[EventTrigger]) {
        let agents = &mut self.write().agents;
        match triggers {
            [] => agents.remove(agent),
            triggers => agents.insert(agent.to_owned(), triggers.to_vec()),
        };
    }

    pub(crate) fn set_webhook(&self, id: &str, topics: Vec<TopicPattern>) {
        self.write().webhooks.insert(id.to_owned(), topics);
    }

    pub(crate) fn remove_webhook(&self, id: &str) {
        self.write().webhooks.remove(id);
    }

    /// Checks whether `count` subscriptions of an agent, or one more webhook, fit beside the
    /// existing ones.
    pub(crate) fn check_room(&self, agent: Option<&str>, count: usize) -> Result<(), RuntimeError> {
        let subscriptions = self.read();
        let others = subscriptions.agents.iter().filter(|(name, _)| Some(name.as_str()) != agent);
        let others = others.map(|(_, triggers)| triggers.len()).sum::<usize>() + subscriptions.webhooks.len();
        if count > 0 && others + count > MAX_SUBSCRIPTIONS {
            let message = format!(
                "{} event triggers and webhooks would be subscribed; at most {MAX_SUBSCRIPTIONS} are allowed, \
                 so remove some first",
                others + count
            );
            return Err(RuntimeError::HostFull { message });
        }
        Ok(())
    }

    fn read(&self) -> RwLockReadGuard<'_, Subscriptions> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Subscriptions> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the host's id of the session, or the reason why there is none.
fn session_of(
    trigger: &EventTrigger,
    principal: &str,
    id: &str,
    topic: &str,
    data: Option<&Value>,
) -> Result<String, String> {
    let session = trigger.session.render(id, topic, data)?;
    Tenant::new(principal).and_then(|tenant| tenant.session(&session)).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SessionTemplate;
    use serde_json::json;

    fn trigger(topic: &str, session: &str) -> EventTrigger {
        EventTrigger {
            topic: TopicPattern::new(topic).expect("a pattern"),
            session: SessionTemplate::parse(session).expect("a template"),
        }
    }

    #[test]
    fn an_event_goes_once_to_each_subscribed_session_and_webhook() {
        let router = EventRouter::default();
        router.set_agent("a", &[trigger("order.*", "s"), trigger("*", "s"), trigger("*", "{data.id}")]);
        router.set_agent("b", &[trigger("bill.*", "s")]);
        router.set_webhook("w", vec![TopicPattern::new("order.paid").expect("a pattern")]);
        let to = |session: &str| Target::Session { agent: "a".into(), session: session.into() };
        let routed = router.route("local", "1", "order.paid", Some(&json!({"id": "t"}).into()));
        let targets: Vec<_> = routed.into_iter().map(|delivery| delivery.target).collect();
        assert_eq!(targets, [to("s"), to("t"), Target::Webhook("w".into())]);
        let of_a_tenant = router.route("acme", "1", "bill.paid", Some(&json!({"id": "rival/t"}).into()));
        let sessions: Vec<_> = of_a_tenant.into_iter().map(|delivery| delivery.target).collect();
        assert_eq!(sessions[0], to("acme/s"));
        assert_eq!(sessions[1], to(""), "an event cannot name a session of another tenant");
        let routed = router.route("local", "1", "order.sent", None);
        assert_eq!(routed.len(), 2);
        assert!(routed[1].undeliverable.as_ref().expect("no id").contains("no data.id"));
        assert!(router.takes("bill.x") && !router.takes("skep.turn.done"));
        router.set_agent("b", &[]);
        router.remove_webhook("w");
        assert_eq!(router.route("local", "1", "bill.x", None).len(), 2);
    }

    #[test]
    fn the_total_number_of_subscriptions_is_bounded() {
        let router = EventRouter::default();
        router.set_agent("a", &vec![trigger("*", "s"); 64]);
        router
            .check_room(Some("a"), MAX_SUBSCRIPTIONS)
            .expect("the agent's own subscriptions do not count twice");
        let refused = router.check_room(Some("b"), MAX_SUBSCRIPTIONS - 63).expect_err("one too many");
        assert!(refused.to_string().contains("1001 event triggers"), "{refused}");
        router.check_room(Some("b"), 0).expect("zero subscriptions always fit");
    }
}
