# The entry to add to _TEMPLATE_COLLECTIONS of the file with this name in github.com/ray-project/ray. Its documentation
# renders the README.md of the Anyscale template. A workflow of Ray adds the pin (template_pins.json).
_TEMPLATE_COLLECTIONS = {
    "rlhf_ppo_lora": {
        "target": "train/examples/rlhf_ppo_lora",
    },
}
