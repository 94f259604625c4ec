"""The bounded queue between target and drafter: fixed slots, reserved before the work, released after it."""
