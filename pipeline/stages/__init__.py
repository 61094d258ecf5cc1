"""One file per stage, with its RECIPE. `train(worker)` runs in every worker of Ray Train. The stages of TRL share trl_*.py."""
