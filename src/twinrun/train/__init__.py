"""What runs inside the ranks: models, data and the Composer adapter; needs torch."""
