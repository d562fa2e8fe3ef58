//! Compares what was ordered, and what the host reported to clients, with what happened outside.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use super::outside::Outside;

/// Outcome of an order, as its client knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reported {
    Done,
    /// The host reports that it does not know whether the effect happened.
    Interrupted,
    /// Contains the error's code. An effect that happened before stays.
    Failed(String),
    /// No client knows whether the host accepted the order, because it was sent without a key.
    Unsure,
}

/// The source of the count of an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    Effect,
    Hook,
    /// Found by looking at the host itself.
    Host,
}

#[derive(Clone, Debug)]
struct Order {
    kind: &'static str,
    id: String,
    reported: Reported,
    evidence: Evidence,
    /// Number of times that the effect was found by looking at the host.
    seen: usize,
}

/// All orders.
#[derive(Default)]
pub struct Books {
    orders: Mutex<Vec<Order>>,
}

/// Outcomes of the orders of one kind.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sum {
    pub orders: usize,
    pub effects: usize,
    /// The host reported that the order is done, but nothing happened.
    pub lost: usize,
    /// The effect happened more than once.
    pub doubled: usize,
    /// The host reported that the outcome is unknown.
    pub interrupted: usize,
    /// The host reported that the turn failed.
    pub failed: usize,
    /// The order was sent without a key, and the answer was lost with the host.
    pub unsure: usize,
}

/// Outcomes of all orders.
#[derive(Debug, Default, Serialize)]
pub struct Account {
    pub kinds: BTreeMap<&'static str, Sum>,
    /// Number of failures by error code.
    pub failures: BTreeMap<String, usize>,
    /// The first orders that were lost or doubled.
    pub faults: Vec<String>,
}

const FAULTS_SHOWN: usize = 20;

impl Books {
    /// Records an order, and what the host reported about it.
    pub fn enter(&self, kind: &'static str, evidence: Evidence, id: &str, reported: Reported) {
        self.push(Order { kind, id: id.to_owned(), reported, evidence, seen: 0 });
    }

    /// Records what was found by looking at the host: `seen` times, although it should be there once.
    pub fn found(&self, kind: &'static str, id: &str, reported: Reported, seen: usize) {
        self.push(Order { kind, id: id.to_owned(), reported, evidence: Evidence::Host, seen });
    }

    fn push(&self, order: Order) {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
    }

    /// Returns the number of orders that are done according to their clients, but have no effect yet.
    pub fn missing(&self, outside: &Outside) -> usize {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        orders
            .iter()
            .filter(|order| {
                order.reported == Reported::Done
                    && order.evidence != Evidence::Host
                    && order.count(outside) == 0
            })
            .count()
    }

    /// Compares all orders with the effects that were counted outside.
    pub fn account(&self, outside: &Outside) -> Account {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let mut account = Account::default();
        for order in orders.iter() {
            let count = order.count(outside);
            let sum = account.kinds.entry(order.kind).or_default();
            sum.orders += 1;
            sum.effects += count;
            match &order.reported {
                Reported::Done => {}
                Reported::Interrupted => sum.interrupted += 1,
                Reported::Unsure => sum.unsure += 1,
                Reported::Failed(code) => {
                    sum.failed += 1;
                    *account.failures.entry(code.clone()).or_default() += 1;
                }
            }
            let fault = match count {
                0 if order.reported == Reported::Done => {
                    sum.lost += 1;
                    "lost"
                }
                0 | 1 => continue,
                _ => {
                    sum.doubled += 1;
                    "doubled"
                }
            };
            if account.faults.len() < FAULTS_SHOWN {
                let Order { kind, id, reported, .. } = order;
                account.faults.push(format!("{kind} {id}: {fault} ({count} times, reported {reported:?})"));
            }
        }
        account
    }
}

impl Order {
    fn count(&self, outside: &Outside) -> usize {
        match self.evidence {
            Evidence::Effect => outside.effects(self.kind, &self.id),
            Evidence::Hook => outside.hooks(&self.id),
            Evidence::Host => self.seen,
        }
    }
}

impl Account {
    /// Returns the number of orders that were reported as done and have no effect.
    pub fn lost(&self) -> usize {
        self.kinds.values().map(|sum| sum.lost).sum()
    }

    /// Returns the number of orders whose effect happened more than once.
    pub fn doubled(&self) -> usize {
        self.kinds.values().map(|sum| sum.doubled).sum()
    }

    /// Returns the number of effects of all orders.
    pub fn effects(&self) -> usize {
        self.kinds.values().map(|sum| sum.effects).sum()
    }

    /// Returns a row for each kind, as text for people.
    pub fn rows(&self) -> Vec<[String; 8]> {
        self.kinds
            .iter()
            .map(|(kind, sum)| {
                let Sum { orders, effects, lost, doubled, interrupted, failed, unsure } = sum;
                let [orders, effects, lost, doubled, interrupted, failed, unsure] =
                    [orders, effects, lost, doubled, interrupted, failed, unsure].map(ToString::to_string);
                [(*kind).to_owned(), orders, effects, lost, doubled, interrupted, failed, unsure]
            })
            .collect()
    }
}

/// Headings of the columns of [`Account::rows`].
pub const COLUMNS: [&str; 8] =
    ["KIND", "ORDERS", "EFFECTS", "LOST", "DOUBLED", "INTERRUPTED", "FAILED", "UNSURE"];

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_order_that_is_done_counts_once_and_one_that_was_interrupted_at_most_once() {
        let outside = Outside::start().await.expect("a server");
        let books = Books::default();
        let post = |path: String, key: &'static str| {
            skep_outbound::tls::install_provider();
            let request = reqwest::Client::new().post(format!("{}{path}", outside.url));
            async move { request.header("idempotency-key", key).send().await.expect("an answer") }
        };
        for (id, reported, keys) in [
            ("once", Reported::Done, ["k", "k"].as_slice()),
            ("never", Reported::Done, &[]),
            ("twice", Reported::Done, &["k", "l"]),
            ("perhaps", Reported::Interrupted, &[]),
            ("perhaps-twice", Reported::Interrupted, &["k", "l"]),
        ] {
            books.enter("keyed", Evidence::Effect, id, reported);
            for key in keys {
                post(format!("/effect/keyed/{id}"), key).await;
            }
        }
        assert_eq!(books.missing(&outside), 1);
        let account = books.account(&outside);
        assert_eq!((account.lost(), account.doubled(), account.effects()), (1, 2, 5));
        assert_eq!(account.kinds["keyed"].interrupted, 2);
        assert_eq!(account.faults.len(), 3, "{:?}", account.faults);
    }
}
