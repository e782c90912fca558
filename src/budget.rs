//! A bound on what many hold together.
//!
//! Each POST may be read up to its own limit, and each event held, but tens of
//! thousands at once would take all of a VM's memory.

use std::cell::Cell;
use std::rc::Rc;

/// A number of bytes for all who hold of it.
#[derive(Debug, Clone)]
pub struct Budget {
    left: Rc<Cell<usize>>,
}

/// A part of a budget, given back when it is dropped.
#[derive(Debug)]
pub struct Held {
    budget: Budget,
    bytes: usize,
}

impl Budget {
    /// A budget of so many bytes.
    pub fn new(bytes: usize) -> Self {
        Budget { left: Rc::new(Cell::new(bytes)) }
    }

    /// A part of it that holds nothing yet.
    pub fn hold(&self) -> Held {
        Held { budget: self.clone(), bytes: 0 }
    }
}

impl Held {
    /// Takes as much more as makes it so many bytes. False if that isn't left:
    /// then it holds what it held.
    pub fn grow_to(&mut self, bytes: usize) -> bool {
        let left = &self.budget.left;
        let Some(rest) = left.get().checked_sub(bytes.saturating_sub(self.bytes)) else {
            return false;
        };
        left.set(rest);
        self.bytes = self.bytes.max(bytes);
        true
    }
}

impl Held {
    /// Gives all of it back.
    pub fn shrink(&mut self) {
        let left = &self.budget.left;
        left.set(left.get().saturating_add(std::mem::take(&mut self.bytes)));
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shrink();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn together_no_more_than_the_budget() {
        let budget = Budget::new(10);
        let (mut one, mut two) = (budget.hold(), budget.hold());
        assert!(one.grow_to(6));
        assert!(!two.grow_to(5));
        assert!(two.grow_to(4));
        assert!(one.grow_to(3));
        assert!(!one.grow_to(7));
        drop(two);
        assert!(one.grow_to(10));
        drop(one);
        assert!(budget.hold().grow_to(10));
    }
}
