"""What happens when a rank fails: who learns of it, how soon, and what comes after."""
