//! Shares limited resources among tenants.
//!
//! If there are several tenants, a tenant may take more of a resource as long as it has no more
//! than a few times the amount that is free. A tenant that takes all it can get therefore always
//! leaves some for others (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory
//! packet switches", 1998). On a host with one tenant, that tenant may use everything.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::sync::oneshot;

/// A tenant may have this many times the free amount: three quarters of the total if it is alone.
pub const TENANT_SHARE: usize = 3;

/// Whether the host has several tenants. Clones share the value.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tenancy(Arc<AtomicBool>);

impl Tenancy {
    pub(crate) fn has_several(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set_several(&self, several: bool) {
        self.0.store(several, Ordering::Relaxed);
    }
}

/// The amounts of one resource that the tenants have taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shares {
    all: usize,
    by_tenant: HashMap<String, usize>,
}

impl Shares {
    /// Returns whether a tenant may take `count` more of `limit`.
    pub(crate) fn may_take(&self, tenant: &str, count: usize, limit: usize, has_several: bool) -> bool {
        let taken = self.by_tenant.get(tenant).copied().unwrap_or_default();
        may_take(taken, self.all, count, limit, has_several)
    }

    pub(crate) fn take(&mut self, tenant: &str, count: usize) {
        self.all += count;
        *self.by_tenant.entry(tenant.to_owned()).or_default() += count;
    }

    pub(crate) fn give_back(&mut self, tenant: &str, count: usize) {
        self.all = self.all.saturating_sub(count);
        if let Some(of_tenant) = self.by_tenant.get_mut(tenant) {
            *of_tenant = of_tenant.saturating_sub(count);
            if *of_tenant == 0 {
                self.by_tenant.remove(tenant);
            }
        }
    }

    pub(crate) fn all(&self) -> usize {
        self.all
    }

    pub(crate) fn by_tenant(&self) -> impl Iterator<Item = (&str, usize)> {
        self.by_tenant.iter().map(|(tenant, count)| (tenant.as_str(), *count))
    }
}

/// Returns whether a tenant that has `taken` may take `count` more, when all tenants together have
/// `all` of `limit`.
pub(crate) fn may_take(taken: usize, all: usize, count: usize, limit: usize, has_several: bool) -> bool {
    let free = limit.saturating_sub(all);
    if count > free || !has_several {
        return count <= free;
    }
    taken + count <= TENANT_SHARE * (free - count + 1)
}

impl FromIterator<(String, usize)> for Shares {
    fn from_iter<I: IntoIterator<Item = (String, usize)>>(taken: I) -> Self {
        let mut shares = Shares::default();
        taken.into_iter().for_each(|(tenant, count)| shares.take(&tenant, count));
        shares
    }
}

/// Permits that tenants can wait for. Clones share the same permits.
#[derive(Clone)]
pub(crate) struct TenantPermits {
    inner: Arc<Inner>,
}

struct Inner {
    limit: usize,
    tenancy: Tenancy,
    queue: Mutex<WaitQueue>,
}

#[derive(Default)]
struct WaitQueue {
    shares: Shares,
    /// Waiters in order of arrival.
    waiting: VecDeque<Waiter>,
}

struct Waiter {
    tenant: String,
    permit: oneshot::Sender<TenantPermit>,
}

/// One permit, released when it is dropped.
pub(crate) struct TenantPermit {
    permits: TenantPermits,
    tenant: String,
}

impl TenantPermits {
    pub(crate) fn new(limit: usize, tenancy: Tenancy) -> Self {
        let inner = Inner { limit: limit.max(1), tenancy, queue: Mutex::default() };
        TenantPermits { inner: Arc::new(inner) }
    }

    /// Returns how many permits are taken, and how many there are.
    pub(crate) fn taken(&self) -> (usize, usize) {
        (self.queue().shares.all(), self.inner.limit)
    }

    /// Waits for a permit, behind earlier waiters that may have one. Dropping the future abandons
    /// the wait without taking a permit.
    pub(crate) async fn take(&self, tenant: &str) -> TenantPermit {
        let (sender, permit) = oneshot::channel();
        self.queue().waiting.push_back(Waiter { tenant: tenant.to_owned(), permit: sender });
        self.serve();
        permit.await.expect("a waiting sender stays in the queue")
    }

    /// Hands out free permits to waiters in order of arrival.
    fn serve(&self) {
        let Inner { limit, tenancy, queue } = &*self.inner;
        loop {
            let next = {
                let WaitQueue { shares, waiting } =
                    &mut *queue.lock().unwrap_or_else(PoisonError::into_inner);
                // Waiters whose future was dropped are removed.
                waiting.retain(|waiter| !waiter.permit.is_closed());
                let may = |waiter: &Waiter| shares.may_take(&waiter.tenant, 1, *limit, tenancy.has_several());
                let next = if shares.all() < *limit { waiting.iter().position(may) } else { None };
                let next = next.and_then(|next| waiting.remove(next));
                next.iter().for_each(|next| shares.take(&next.tenant, 1));
                next
            };
            let Some(Waiter { tenant, permit }) = next else { return };
            // If the waiter was dropped just now, the permit is released when the result of `send`
            // is dropped.
            drop(permit.send(TenantPermit { permits: self.clone(), tenant }));
        }
    }

    fn queue(&self) -> MutexGuard<'_, WaitQueue> {
        self.inner.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TenantPermit {
    fn drop(&mut self) {
        self.permits.queue().shares.give_back(&self.tenant, 1);
        self.permits.serve();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::timeout;

    fn take_all(shares: &mut Shares, tenant: &str, has_several: bool) -> usize {
        let before = shares.all();
        while shares.may_take(tenant, 1, 64, has_several) {
            shares.take(tenant, 1);
        }
        shares.all() - before
    }

    #[test]
    fn a_tenant_takes_at_most_three_quarters_and_leaves_some_for_others() {
        let mut shares = Shares::default();
        let counts: Vec<usize> =
            ["greedy", "second", "third"].iter().map(|tenant| take_all(&mut shares, tenant, true)).collect();
        assert_eq!(counts, [48, 12, 3]);
        shares.give_back("greedy", 40);
        assert_eq!(take_all(&mut shares, "third", true), 30, "another tenant gets what one gives back");
        assert!(shares.may_take("somebody new", 1, 64, true));
    }

    #[test]
    fn the_only_tenant_takes_everything() {
        assert_eq!(take_all(&mut Shares::default(), "local", false), 64);
        let shares = Shares::from_iter([("local".to_owned(), 60)]);
        assert!(shares.may_take("local", 4, 64, false) && !shares.may_take("local", 5, 64, false));
    }

    #[test]
    fn taking_several_at_once_equals_taking_them_one_by_one() {
        for (taken, others) in [(0, 0), (10, 20), (40, 0), (47, 1), (0, 60)] {
            let shares = Shares::from_iter([("a".to_owned(), taken), ("b".to_owned(), others)]);
            for count in 1..=70 {
                let mut one_by_one = shares.clone();
                let all = (0..count).all(|_| {
                    let may = one_by_one.may_take("a", 1, 64, true);
                    one_by_one.take("a", usize::from(may));
                    may
                });
                assert_eq!(shares.may_take("a", count, 64, true), all, "{count} beside {taken} and {others}");
            }
        }
    }

    #[tokio::test]
    async fn permits_are_granted_in_the_order_of_requests() {
        let permits = TenantPermits::new(1, Tenancy::default());
        let held = permits.take("a").await;
        let (first, given_up, second) = (permits.take("a"), permits.take("a"), permits.take("a"));
        tokio::pin!(first, second);
        timeout(Duration::ZERO, first.as_mut()).await.err().expect("the only permit is taken");
        timeout(Duration::ZERO, given_up).await.err().expect("the only permit is taken");
        timeout(Duration::ZERO, second.as_mut()).await.err().expect("the only permit is taken");
        drop(held);
        timeout(Duration::ZERO, permits.take("a")).await.err().expect("others came before");
        timeout(Duration::ZERO, second.as_mut()).await.err().expect("the first waiter comes first");
        drop(first.await);
        drop(second.await);
        drop(permits.take("a").await);
    }

    #[tokio::test]
    async fn a_waiter_gets_a_permit_only_within_its_share() {
        let tenancy = Tenancy::default();
        tenancy.set_several(true);
        let permits = TenantPermits::new(4, tenancy);
        let mut greedy = Vec::new();
        for _ in 0..3 {
            greedy.push(permits.take("a").await);
        }
        let more = permits.take("a");
        tokio::pin!(more);
        timeout(Duration::ZERO, more.as_mut()).await.err().expect("the fourth is for others");
        let other = permits.take("b").await;
        timeout(Duration::ZERO, permits.take("c")).await.err().expect("all four permits are taken");
        drop(other);
        timeout(Duration::ZERO, more.as_mut()).await.err().expect("the fourth is still for others");
        greedy.pop();
        more.await;
    }
}
